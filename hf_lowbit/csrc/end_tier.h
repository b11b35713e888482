/* Forgets what a tier defined. */
#undef VB
#undef LANES
#undef OFFSET8
#undef NARROW
#undef ROWS_GROUPED
#undef ROWS_UNGROUPED
#undef TILE
#undef FLOAT_SHIFT
#undef PANEL
#undef PANEL_FIELDS
#undef PANEL_TILES
#undef DOT_RANGE
