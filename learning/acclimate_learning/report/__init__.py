"""Reports that anybody can read: one HTML file each, which asks for nothing from elsewhere."""
