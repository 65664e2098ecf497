"""`Pipe`: an `nn.Sequential` as a pipeline over the devices of one process (GPipe)."""
