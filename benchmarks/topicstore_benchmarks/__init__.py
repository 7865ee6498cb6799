"""How fast topicstore is, in sections that ``python -m topicstore_benchmarks`` runs, all or one.

``limits``   `block` against the engine's own put and scan: `limits` with the messages of `cases`
``opening``  opening a large database: `opening`
``layouts``  all layouts, SQLite and the engine with real and made messages: `layouts`, of the
             times of `comparison` and the memory of `growth`; `sets` has the messages, `sides`
             and `sqlite` are what is compared
``trie``     the learned topic structure with a million topics: `trie_figures`, of what `trie` measures

`raw_engine` is the engine alone, `timing` how time is taken, `figures` what comes out.
"""
