"""What the benchmark, the self-test and calibrate() share: the measured collectives, clocks, processes."""
