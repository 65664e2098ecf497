"""Checks of the machines that a run is meant for. They use the package as a script does: by its public names."""
