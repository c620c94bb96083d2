"""The vLLM plugin: the acceptance core inside vLLM's V1 model runner.

Nothing here imports vLLM until vLLM itself loads the plugin. The way of a verdict through the processes:

    front end        settings.py    checks a request's `dropmatch*` keys, refuses with a 400
    worker           install.py     puts the parts into place, after hooks.py has found vLLM to be as expected
                     drafts.py      keeps the draft's logits until they are verified
                     verifier.py    judges the draft rows, and lets vLLM's own kernels carry the verdicts out
                     head.py        the target's LM head, tensor-parallel or not
                     cpu_fixes.py   what has to be mended in vLLM itself
    engine core      reporting.py   passes the reasons on
    front end        reporting.py   counts what was delivered: Prometheus, and per request

`plugin.register` is the entry point that vLLM calls in each of them.
"""
