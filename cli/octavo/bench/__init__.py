"""Measuring servers: load, clocks and reports."""
