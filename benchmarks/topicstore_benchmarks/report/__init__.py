"""The page that a person reads first: a run's rows in, one HTML file out.

`run` reads the rows, `estimates` says what repetitions allow to be said, `questions` what is asked of
the figures, `verdict` answers in sentences and tables, `charts` draws, `page` puts it together.
"""
