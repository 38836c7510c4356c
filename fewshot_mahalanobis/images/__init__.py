"""Images: decoding, formats, folders of classes and labels."""
