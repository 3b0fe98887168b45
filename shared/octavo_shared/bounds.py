"""Numbers that no request exceeds, whoever sends it: a broken sender must not decide how much state a service makes."""

# Choices of one request; each has state in every service.
MAX_CHOICES = 4096
# Prompts of one answer.
MAX_PROMPTS = 65536
