"""The layouts that come with topicstore, one module or package each; what several are made of is in `shared`."""
