"""What an installed wheel has in place of parts of the toolkit; see `opwright.package.runtime`."""
