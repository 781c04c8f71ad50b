"""Packs: kernels recorded, built, examined, compared, tuned and linked, from a manifest to one file.

A folder of its own, because the folder above is on `sys.path` while a worker starts: a file `inspect.py` there would
be imported in place of the standard library's.
"""
