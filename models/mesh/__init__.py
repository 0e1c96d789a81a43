"""All kinds of parallelism on one mesh; start with README.md."""
