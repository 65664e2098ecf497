"""Pipeline schedules: what they can do, tables of what each rank does in order, and the layout of a run. Pure."""
