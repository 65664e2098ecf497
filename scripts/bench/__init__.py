"""The suite of benchmarks and studies: `python -m scripts.bench`."""
