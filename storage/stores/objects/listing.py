"""Files and folders out of listings of keys. Pure: pages come from whoever asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dcp.storage.stores.base import FileInfo
from dcp.storage.stores.names import is_name
from dcp.storage.stores.objects.client import ListingPage, ObjectInfo

__all__ = ["deep_files", "file_info", "files_of", "folder_tree", "folders_of", "key_tree", "name_of"]


def file_info(name: str, info: ObjectInfo) -> FileInfo:
    """An object as the file that it is to a store."""
    return FileInfo(name, info.size_bytes, info.modified_seconds)


def name_of(key: str, prefix: str) -> str | None:
    """The file's name below ``prefix``, None for what lies deeper or cannot be a file of a checkpoint."""
    name = key[len(prefix) :]
    return name if is_name(name) else None


def files_of(pages: Iterable[ListingPage], prefix: str) -> list[FileInfo]:
    """The files directly below ``prefix``, sorted."""
    found = []
    for page in pages:
        for info in page.objects:
            if (name := name_of(info.key, prefix)) is not None:
                found.append(file_info(name, info))
    return sorted(found, key=lambda info: info.name)


def deep_files(pages: Iterable[ListingPage], prefix: str) -> Iterator[tuple[str, FileInfo]]:
    """The files of all folders directly below ``prefix``: (folder, file)."""
    for page in pages:
        for info in page.objects:
            folder, separator, name = info.key[len(prefix) :].partition("/")
            if separator and is_name(folder) and is_name(name):
                yield folder, file_info(name, info)


def key_tree(pages: Iterable[ListingPage], prefix: str) -> Iterator[tuple[str, FileInfo]]:
    """All files below ``prefix``, however deep: (folder relative to it, "" is itself; file)."""
    for page in pages:
        for info in page.objects:
            folder, _, name = info.key[len(prefix) :].rpartition("/")
            if is_name(name) and (not folder or all(map(is_name, folder.split("/")))):
                yield folder, file_info(name, info)


def folder_tree(
    list_folder: Callable[[str], ListingPage], prefix: str, folder: str = ""
) -> Iterator[tuple[str, FileInfo]]:
    """As `key_tree`, by one listing of each folder, given its prefix."""
    page = list_folder(prefix)
    for info in page.objects:
        if (name := name_of(info.key, prefix)) is not None:
            yield folder, file_info(name, info)
    for deeper in page.prefixes:
        name = deeper[len(prefix) :].removesuffix("/")
        if is_name(name):
            yield from folder_tree(list_folder, deeper, f"{folder}/{name}".removeprefix("/"))


def folders_of(pages: Iterable[ListingPage], prefix: str) -> list[str]:
    """Names of the folders directly below ``prefix``, sorted."""
    found = set()
    for page in pages:
        found |= {deeper[len(prefix) :].removesuffix("/") for deeper in page.prefixes}
    return sorted(filter(is_name, found))
