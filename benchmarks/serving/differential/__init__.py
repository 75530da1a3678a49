"""The parts of ``python -m benchmarks.serving.differential``, which sends the same requests to quire and to vLLM.

``asked`` draws the requests, ``answers`` sends them and reads the answers, ``deviations`` compares two answers.
"""
