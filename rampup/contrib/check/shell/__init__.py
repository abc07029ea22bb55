"""A reader of launch scripts: the parts of bash that decide a command's arguments."""
