# SPDX-License-Identifier: Apache-2.0
"""The index as a service of its own: other routers register their engines and query it by HTTP."""
