"""The block: header, columns, codec, how it is built, and how it is read."""
