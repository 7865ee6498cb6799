"""`DatabaseSuite`: tests of whole databases, on a pair of a backend and a layout."""
