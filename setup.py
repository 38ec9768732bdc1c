"""Everything pip needs to know stands in settings.ini; this file only passes it on."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

root = Path(__file__).parent
parser = ConfigParser(delimiters=["="], interpolation=None)
parser.read(root / "settings.ini", encoding="utf-8")
ini = parser["DEFAULT"]
url = f"https://github.com/{ini['user']}/{ini['repo']}"

setup(
    name=ini["lib_name"],
    version=ini["version"],
    description=ini["description"],
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=ini["keywords"].split(),
    author=ini["author"],
    author_email=ini["author_email"],
    license="Apache-2.0",
    url=url,
    project_urls={"Source": url},
    classifiers=[
        "Development Status :: 3 - Alpha",
        f"Intended Audience :: {ini['audience']}",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
    ],
    python_requires=f">={ini['min_python']}",
    packages=["facenb"],
    install_requires=ini["requirements"].split(),
    extras_require={
        "dev": ini["dev_requirements"].split(),
        "onnx": ini["onnx_requirements"].split(),
        "tensorboard": ini["tensorboard_requirements"].split(),
        "retinaface": ini["retinaface_requirements"].split(),
    },
    entry_points={"console_scripts": [ini["console_scripts"]]},
)
