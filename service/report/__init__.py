"""Pages of numbers and pictures: one HTML file with inline SVG, nothing fetched. And the limits of goodput."""
