# SPDX-License-Identifier: Apache-2.0
"""Commands that measure a live cluster: calibrate a cost model on it, replay a trace against it.

They use the OpenAI API and nothing else, so that any server of it can be measured. The output has the form of
the simulator's results: measured and predicted stand in one table.
"""
