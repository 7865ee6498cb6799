"""The report of a run: reads the rows and writes one HTML file.

`run` reads the rows, `estimates` computes medians and intervals, `questions` defines the questions to the
figures, `verdict` answers them in sentences and tables, `charts` draws plots, and `page` assembles the page.
"""
