"""Towers, encoders and other parts that a script froze: found by trying, looked up by what they are called with.

In: a model and one small batch. Out: parts whose forward reads what it has computed before.
"""
