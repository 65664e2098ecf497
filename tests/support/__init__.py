"""Models, data and helpers that the tests of several rooms use."""
