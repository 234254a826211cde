"""The exporter's own error. `graphs` never imports `service`, so this one stands beside that tree."""


class ExportError(ValueError):
    """A source cannot be exported. One clear line that names the file, the field, its value and the limit."""
