"""The vLLM plugin: the acceptance core inside vLLM's model runners, V1 and V2.

Nothing here imports vLLM until vLLM itself loads the plugin. The way of a verdict through the processes:

    front end        settings.py    checks a request's `dropmatch*` keys, refuses with a 400
    worker           install.py     puts the parts into place, after hooks.py has found vLLM to be as expected
                     requests.py    the settings of the requests that the worker holds
                     drafts.py      keeps the draft's logits until they are verified
                     verifier.py    finds the draft rows to judge, and lets vLLM's own kernels carry the verdicts out
                     step.py        what a verification has to go on, and how accepted rows leave the kernels no choice
                     rows.py        from such rows to evidence, and to the core's verdict
                     head.py        the target's LM head, tensor-parallel or not
                     cpu_fixes.py   what has to be mended in vLLM itself
    engine core      reporting.py   passes the reasons on
    front end        reporting.py   counts what was delivered: Prometheus, and per request

install_v2.py and verifier_v2.py stand in for their namesakes with the V2 runner, which keeps draft logits itself.
`plugin.register` is the entry point that vLLM calls in each process. command.py and environment.py serve
`dropmatch serve` alone.
"""
