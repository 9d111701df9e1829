"""The block: header, columns, codec, builder and reader."""
