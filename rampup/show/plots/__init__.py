"""Pictures with matplotlib, which is imported when one is drawn: pip install 'rampup[plot]'.

Every function returns the figure, for a notebook, and writes it into a file if it is given one. None of them touches pyplot's
figures or its backend.
"""

from rampup.show.plots.ramp import draw_batch, draw_rate
from rampup.show.plots.runs import draw_memory, draw_runs
from rampup.show.plots.timetable import draw_timetable

__all__ = ["draw_batch", "draw_memory", "draw_rate", "draw_runs", "draw_timetable"]
