"""The wire contract, package ``octavo.v1``.

The ``.proto`` files are the source; the modules beside them are generated (``make proto``) and committed. Only
``octavo_shared.wire`` and ``octavo_shared.entries`` touch the generated messages: everything else uses the frozen
dataclasses of ``records``, ``plan`` and ``fold``.
"""
