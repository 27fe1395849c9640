# The lessons in JupyterLab:
#     docker build -t gpu-lessons . && docker run -p 8888:8888 -v ./lessons:/lessons gpu-lessons
FROM python:3.12-slim

# What else is installed; "lessons,torch,gpu" is all that runs on a GPU.
ARG EXTRAS=lessons

# For a development container, which calls make and git.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /course
COPY pyproject.toml README.md LICENSE pytest_cuda_sanitize.py ./
COPY .jupyter .jupyter
COPY course_lib course_lib
COPY data/results data/results
COPY notebooks notebooks
RUN python -m pip install --no-cache-dir ".[${EXTRAS}]"

WORKDIR /lessons
EXPOSE 8888
# The container's network is all that can reach it, and only with the token that it prints.
CMD ["python", "-m", "course_lib", "lab", "/lessons", "--no-browser", "--port=8888", "--ip=0.0.0.0"]
