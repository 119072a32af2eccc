"""Formulas: element-wise functions as data, and their code."""
