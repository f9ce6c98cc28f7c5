"""Admission to the page: passwords, cookies, and whether another site has led a browser here."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import msgspec

ADMIN, VIEWER = "admin", "viewer"
OPEN_PATHS = ("/livez", "/readyz")
FAILURE_S = 1.0  # before a wrong password is answered
FAILURES_MAX = 8  # of one machine that wait at one time
FORM_BYTES_MAX = 4096
COOKIE_S = 30 * 24 * 3600
HEADERS = {
    # The page asks no other host for anything, and no other page may show it in a frame.
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval'; img-src 'self' data: blob:; "
    "font-src 'self' data:; frame-ancestors 'none'; form-action 'self'; base-uri 'self'",
    "Referrer-Policy": "same-origin",  # with none, forms are of the origin "null"
    "X-Content-Type-Options": "nosniff",
}
LOGIN = Path(__file__).with_name("login.html").read_text()


class WebAccess(msgspec.Struct, frozen=True):
    """The conditions of admission. Each of ``passwords`` has its role; there are none where a proxy asks for them."""

    passwords: list[tuple[str, str]]
    key: str  # signs the cookies
    port: int
    proxy: str = ""  # the origin at which browsers see the page through a reverse proxy
    loopback: bool = True

    def role_of_password(self, given: str) -> str:
        """The role; empty for a wrong password. It takes as long for each."""
        roles = [role for password, role in self.passwords if _equal(password, given)]
        return roles[0] if roles else ""

    def cookie(self, role: str) -> str:
        return f"{role}.{hmac.digest(self.key.encode(), role.encode(), 'sha256').hex()}"

    def role(self, headers: Any, cookies: Any) -> str:
        """The role of a request by its header ``Authorization: Bearer PASSWORD`` or its cookie; empty without any."""
        if not self.passwords:
            return ADMIN
        if given := self.bearer(headers):
            return self.role_of_password(given)
        cookie = cookies.get(self.cookie_name, "")
        return next((role for role in (ADMIN, VIEWER) if _equal(self.cookie(role), cookie)), "")

    def bearer(self, headers: Any) -> str:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return given.strip() if scheme.lower() == "bearer" else ""

    @property
    def cookie_name(self) -> str:
        return f"envhub-{self.port}"  # cookies of all ports of a host are in one jar

    def foreign(self, headers: Any) -> str:
        """The reason to refuse a request to which another site may have led a browser; empty if there is none."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own_host(host):  # its scripts could read the page, as a page of theirs
            return f"this page is not at the host {host[:100]!r}"
        if origin not in (None, f"http://{host}", f"https://{host}", self.proxy):
            return "another site asks for this page"
        return ""

    def _is_own_host(self, host: str) -> bool:
        if not self.loopback and self.passwords:
            return True  # of any name: a cookie is of one host
        if self.proxy and host == urlsplit(self.proxy).netloc:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _equal(secret: str, given: str) -> bool:
    return hmac.compare_digest(secret.encode(), given.encode())


class Gate:
    """An ASGI application before another one; the role of the client is ``scope["role"]``."""

    def __init__(self, app: Any, access: WebAccess) -> None:
        self._app, self._access = app, access
        self._failing = Counter[str]()  # by machine, those of its wrong passwords that wait for their answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import HTTPConnection
        from starlette.responses import HTMLResponse, PlainTextResponse

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((a.encode(), b.encode()) for a, b in HEADERS.items())]
            await send(message)

        asked, path, (client, *_) = HTTPConnection(scope), scope["path"], scope["client"] or [""]
        given = self._access.bearer(asked.headers) or asked.query_params.get("token", "")
        posts = path == "/login" and scope.get("method") == "POST"
        app: Any
        if why := self._access.foreign(asked.headers):
            app = PlainTextResponse(why, 403)
        elif path in OPEN_PATHS:
            scope["role"], app = "", self._app
        elif (posts or given) and self._failing[client] >= FAILURES_MAX:
            app = PlainTextResponse("too many wrong passwords; try again in a second", 429)
        elif posts:
            app = await self._admit(await _password_in(receive), "/", client)
        elif path == "/login":
            app = HTMLResponse(LOGIN)
        elif role := self._access.role(asked.headers, asked.cookies):
            scope["role"], app = role, self._app
        elif given:
            app = await self._admit(given, path, client)
        elif "text/html" in asked.headers.get("accept", ""):
            app = HTMLResponse(LOGIN, 401)
        else:
            app = PlainTextResponse("give the password as `Authorization: Bearer PASSWORD`", 401)
        await app(scope, receive, sending)

    async def _admit(self, password: str, path: str, client: str) -> Any:
        """Give a cookie for the right password and go on without it in the address; slowly refuse a wrong one."""
        from starlette.responses import HTMLResponse, RedirectResponse

        if not (role := self._access.role_of_password(password)):
            self._failing[client] += 1
            try:
                await asyncio.sleep(FAILURE_S)
            finally:
                self._failing[client] -= 1
                self._failing += Counter()  # without those that are 0
            return HTMLResponse(LOGIN + "This is not the password.", 401)
        answer = RedirectResponse(quote("/" + path.lstrip("/\\")), 303)  # of this host, whatever the path begins with
        secure, cookie = self._access.proxy.startswith("https:"), self._access.cookie(role)
        answer.set_cookie(self._access.cookie_name, cookie, COOKIE_S, httponly=True, secure=secure, samesite="lax")
        return answer


async def _password_in(receive: Any) -> str:
    """The password in a form; of a body that has more than a form's bytes no more is read."""
    body, message = b"", {"more_body": True}
    while message.get("more_body") and len(body) <= FORM_BYTES_MAX:
        message = await receive()
        body += message.get("body", b"")
    return parse_qs(body[:FORM_BYTES_MAX].decode(errors="replace")).get("password", [""])[0]
