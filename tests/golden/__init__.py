"""Files in the published formats, kept so that every later version still reads them."""
