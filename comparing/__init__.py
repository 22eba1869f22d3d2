"""Runs compared: reads the file formats of run folders and nothing else; no torch. compare.py is its front."""
