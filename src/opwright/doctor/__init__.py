"""What is wrong with a machine, or with a library: `opwright doctor`."""
