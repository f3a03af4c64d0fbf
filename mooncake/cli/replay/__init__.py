"""Commands that measure a live cluster: calibrate a cost model on it, replay a trace against it.

They speak the OpenAI API and nothing else, so that any server of it can be measured. What comes out has the
form of the simulator's outcomes: measured and predicted stand in one table.
"""
