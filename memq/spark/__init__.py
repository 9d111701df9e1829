"""memq in PySpark: topics as data frames, read directly from the store.

PySpark finds it by `format("memq")`, without registration.
"""
