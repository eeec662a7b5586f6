"""The parts of the interactive chart; all of them import bokeh (`optpipe.plot.interactive`)."""
