"""Pipeline parallelism on unchanged modules: where to cut, what crosses, and who runs what when."""
