"""The layouts that come with topicstore, one module or package each; `shared` has the parts that several use."""
