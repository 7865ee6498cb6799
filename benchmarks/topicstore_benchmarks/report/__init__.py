"""The report of a run: reads the rows and writes one HTML file.

`run` reads the rows, `estimates` computes medians and intervals, `verdict` asks the questions and answers them in
grids, `charts` draws pictures, and `page` assembles the page from ``page.html`` and ``style.css``.
"""
