"""Lists what a hub can make: the names in Gymnasium's registry, and what is wrong with factories."""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import importlib
import os
import signal
from importlib.util import find_spec
from typing import Any

from envhub.errors import shortened
from envhub.protocol import messages
from envhub.values.gym_api import registered
from envhub_server.ipc import control
from envhub_server.ipc.packages import remedy_of
from envhub_server.worker.env_sources import why_missing

# https://registry.khronos.org/EGL/api/EGL/egl.h and eglext.h
EGL_PLATFORM_DEVICE = 0x313F
EGL_PBUFFER_BIT, EGL_OPENGL_BIT, EGL_OPENGL_API = 0x0001, 0x0008, 0x30A2
EGL_SURFACE_TYPE, EGL_RENDERABLE_TYPE, EGL_NONE = 0x3033, 0x3040, 0x3038
DEVICES_MAX = 32
OSMESA_RGBA, GL_UNSIGNED_BYTE = 0x1908, 0x1401  # of Mesa's osmesa.h and gl.h
SIDE = 16  # pixels of a picture that is tried

NVIDIA = "in a container with an NVIDIA GPU, set NVIDIA_DRIVER_CAPABILITIES=all and start it with --gpus all"
DEVICES = "give the hub the devices in /dev/dri (docker run --device /dev/dri)"
SOFTWARE = "or install Mesa's drivers: apt-get install libegl-mesa0 libgl1-mesa-dri"


def why_not(backend: str) -> str:
    """The reason why ``"egl"`` or ``"osmesa"`` draws nothing in this process, and a remedy; empty if it draws."""
    if any(map(find_spec, ("mujoco", "dm_control"))) and find_spec("OpenGL") is None:
        return "MuJoCo renders by PyOpenGL, which is missing: pip install PyOpenGL"
    return _why_no_egl() if backend == "egl" else _why_no_osmesa()


def _library(name: str, file: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(ctypes.util.find_library(name) or file)
    except OSError:
        return None


def _why_no_egl() -> str:
    egl = _library("EGL", "libEGL.so.1")
    if egl is None:
        return "there is no libEGL: apt-get install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"
    if _library("OpenGL", "libOpenGL.so.0") is None and _library("GL", "libGL.so.1") is None:
        return "there is no libGL, by which a context of EGL is drawn into: apt-get install libgl1"
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    addresses = [egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglGetPlatformDisplayEXT")]
    if not all(addresses):
        return f"libEGL finds no devices, for it is too old: {SOFTWARE}"
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(addresses[0])
    display_of = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)(addresses[1])
    devices, count = (ctypes.c_void_p * DEVICES_MAX)(), ctypes.c_int()
    if not query(DEVICES_MAX, devices, ctypes.byref(count)) or not count.value:
        return f"EGL has no device: {DEVICES}; {NVIDIA}; {SOFTWARE}"
    for device in devices[: count.value]:
        if _draws(egl, display_of(EGL_PLATFORM_DEVICE, device, None)):
            return ""
    return f"EGL can use none of its {count.value} devices: {_permissions() or DEVICES}; {NVIDIA}; {SOFTWARE}"


def _draws(egl: ctypes.CDLL, display: int | None) -> bool:
    pointer = ctypes.c_void_p
    egl.eglCreateContext.restype = pointer
    if not display or not egl.eglInitialize(pointer(display), None, None):
        return False
    try:
        wanted = [EGL_SURFACE_TYPE, EGL_PBUFFER_BIT, EGL_RENDERABLE_TYPE, EGL_OPENGL_BIT, EGL_NONE]
        attributes, config, count = (ctypes.c_int * len(wanted))(*wanted), pointer(), ctypes.c_int()
        chosen = egl.eglChooseConfig(pointer(display), attributes, ctypes.byref(config), 1, ctypes.byref(count))
        if not chosen or not count.value or not egl.eglBindAPI(EGL_OPENGL_API):
            return False
        context = egl.eglCreateContext(pointer(display), config, None, None)
        if not context:
            return False
        current = bool(egl.eglMakeCurrent(pointer(display), None, None, pointer(context)))
        egl.eglMakeCurrent(pointer(display), None, None, None)
        egl.eglDestroyContext(pointer(display), pointer(context))
        return current
    finally:
        egl.eglTerminate(pointer(display))


def _permissions() -> str:
    """Advice where the devices exist and this user may not open them; else empty."""
    closed = [path for path in sorted(glob.glob("/dev/dri/renderD*")) if not os.access(path, os.R_OK | os.W_OK)]
    return f"this user may not open {closed[0]}: add it to the group that owns it, mostly render" if closed else ""


def _why_no_osmesa() -> str:
    mesa = _library("OSMesa", "libOSMesa.so.8")
    if mesa is None:
        return "there is no libOSMesa: apt-get install libosmesa6"
    mesa.OSMesaCreateContextExt.restype = ctypes.c_void_p
    context = mesa.OSMesaCreateContextExt(OSMESA_RGBA, 24, 0, 0, None)
    if not context:
        return "OSMesa makes no context: apt-get install --reinstall libosmesa6"
    picture = (ctypes.c_ubyte * (4 * SIDE * SIDE))()
    made = mesa.OSMesaMakeCurrent(ctypes.c_void_p(context), picture, GL_UNSIGNED_BYTE, SIDE, SIDE)
    mesa.OSMesaDestroyContext(ctypes.c_void_p(context))
    return "" if made else "OSMesa cannot draw into memory: apt-get install --reinstall libosmesa6"


WHY_CHARS_MAX = 300  # of the exception of a module
FACTORIES_S = 60  # time limit for importing the modules of all factories, before a client asks for an env


def list_names(worker: Any, wanted: control.ListNames) -> bool:
    """List for a ``Worker``, which makes no envs then."""
    for module in wanted.modules:
        worker.channel.send(control.Building(0, module))
        try:
            importlib.import_module(module)
        except BaseException as error:
            worker.reports.send(error, None, "factory_failed")
    worker.channel.send(control.Building(0))
    worker.channel.send(messages.EnvNames(registered()))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends this process
    signal.alarm(FACTORIES_S)
    for entry in wanted.entries:
        worker.channel.send(control.Building(0, entry.partition(":")[0]))
        try:
            missing = why_missing(entry)
        except BaseException as error:
            worker.reports.send(error, None, "factory_failed")
            text = shortened(f"{type(error).__name__}: {error}", WHY_CHARS_MAX)
            worker.channel.send(control.FactoryFailed(entry, text, remedy_of(error, served=True), missing=False))
        else:
            if missing:
                is_there = getattr(missing, "name", None) != entry.partition(":")[0].partition(".")[0]
                remedy = remedy_of(missing, served=True)
                worker.channel.send(control.FactoryFailed(entry, str(missing), remedy, is_there))
    worker.channel.send(control.Building(0))
    if wanted.rendering:
        worker.channel.send(control.RenderingTried(why_not(wanted.rendering)))
    return False
