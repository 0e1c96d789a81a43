"""Pipeline parallelism: each rank holds some of the layers; start with README.md."""
