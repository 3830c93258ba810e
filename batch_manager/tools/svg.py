"""The colours and the document frame of all SVG pictures. A white background keeps them readable on dark pages."""

from collections.abc import Iterable

INK, FAINT, GRID = "#1f2933", "#6b7785", "#e3e6ea"
BLUE, ORANGE = "#2f6db5", "#e0803a"
GREEN, PINK, YELLOW, GREY = "#3a9268", "#b5568f", "#c9a227", "#6f7a86"


def document(width: float, height: float, elements: Iterable[str]) -> str:
    """Return an SVG document of these elements, one per line. Sizes are in pixels."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *elements,
        "</svg>"]) + "\n"
