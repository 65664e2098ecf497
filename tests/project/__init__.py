"""Tests of the command line, the pages and the rules of the house."""
