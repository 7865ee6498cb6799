"""The report of a run: reads the rows of the results and writes one HTML file.

`run` reads the rows, `estimates` computes medians and confidence intervals, `verdict` compares contenders, `charts`
draws the pictures, and `page` assembles the page from ``page.html`` and ``style.css``.
"""
