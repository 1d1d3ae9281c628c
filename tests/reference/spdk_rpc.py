"""A JSON-RPC server with the state of an SPDK application, and its refusals (v24.01 to v26.05)."""

import json
import socket
import threading
from pathlib import Path

INVALID_PARAMETERS, NO_DEVICE, EXISTS = -32602, -19, -17


class RefusalError(Exception):
    """An error response."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def invalid(condition, message="Invalid parameters", code=INVALID_PARAMETERS):
    if condition:
        raise RefusalError(code, message)


class FakeSpdk:
    """Serves one socket; `calls` lists every method that changes something.

    Before change number *fail_at* it answers with an error, once; `hang_up_at` closes instead.
    """

    def __init__(self, path, *, version=(24, 1), engines=("uring", "aio")):
        self.path, self.version, self.engines = Path(path), version, engines
        self.bdevs, self.subsystems, self.transports = {}, {}, []
        self.calls, self.fail_at, self.hang_up_at = [], None, None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connections = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self):
        # close() alone does not wake up accept
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.path.unlink()

    def picture(self):
        return json.dumps([self.bdevs, self.subsystems], sort_keys=True)

    # -- the wire

    def _accept(self):
        threads = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=self._serve, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, connection):
        decoder, text = json.JSONDecoder(), ""
        with connection:
            while data := connection.recv(1000):
                text = (text + data.decode()).lstrip()
                try:
                    request, end = decoder.raw_decode(text)
                except ValueError:
                    continue
                text = text[end:]
                answer = {"jsonrpc": "2.0", "id": request["id"]}
                try:
                    answer["result"] = self._answer(request["method"], request.get("params", {}))
                except RefusalError as refusal:
                    answer["error"] = {"code": refusal.code, "message": str(refusal)}
                except ConnectionAbortedError:
                    return
                connection.sendall(json.dumps(answer).encode())

    def _answer(self, method, params):
        invalid(method not in self._methods(), "Method not found", -32601)
        changes = "_get_" not in method
        if changes:
            if len(self.calls) == self.hang_up_at:
                raise ConnectionAbortedError
            if len(self.calls) == self.fail_at:
                self.fail_at = None
                raise RefusalError(-32603, "Internal error")
            self.calls.append(method)
        for engine in self.engines:
            if method == f"bdev_{engine}_create":
                return self.create_bdev(engine, **params)
            if method == f"bdev_{engine}_delete":
                return self.delete_bdev(engine, **params)
        return getattr(self, method)(**params)

    def _methods(self):
        own = [n for n in dir(self) if n.startswith(("nvmf_", "bdev_get", "spdk_", "rpc_"))]
        return own + [f"bdev_{e}_{verb}" for e in self.engines for verb in ("create", "delete")]

    # -- methods

    def rpc_get_methods(self):
        return self._methods()

    def spdk_get_version(self):
        major, minor = self.version
        fields = {"major": major, "minor": minor, "patch": 0, "suffix": ""}
        return {"version": f"SPDK v{major}.{minor:02d}", "fields": fields}

    def bdev_get_bdevs(self, name=None):
        invalid(name and name not in self.bdevs, "No such device", NO_DEVICE)
        return [self.bdevs[name]] if name else list(self.bdevs.values())

    def create_bdev(self, engine, name, filename, block_size=0):
        invalid(name in self.bdevs, "File exists", EXISTS)
        path = Path(filename)
        invalid(not path.exists(), "No such file or directory", -2)
        invalid(path.is_file() and block_size < 512, "Invalid argument", -22)
        self.bdevs[name] = {
            "name": name,
            "product_name": {"uring": "URING bdev", "aio": "AIO disk"}[engine],
            "block_size": block_size or 512,
            "claimed": False,
            "driver_specific": {engine: {"filename": filename}},
        }
        return name

    def delete_bdev(self, engine, name):
        invalid(name not in self.bdevs, "No such device", NO_DEVICE)
        invalid(engine not in self.bdevs[name]["driver_specific"], "No such device", NO_DEVICE)
        for subsystem in self.subsystems.values():  # a hot removal
            kept = [n for n in subsystem["namespaces"] if n["bdev_name"] != name]
            subsystem["namespaces"] = kept
        del self.bdevs[name]
        return True

    def nvmf_get_transports(self):
        return self.transports

    def nvmf_create_transport(self, trtype):
        wrong = f"Transport type '{trtype}' already exists"
        invalid(any(t["trtype"] == trtype for t in self.transports), wrong, -32603)
        self.transports.append({"trtype": trtype, "max_io_size": 131072})
        return True

    def nvmf_get_subsystems(self):
        return list(self.subsystems.values())

    def nvmf_create_subsystem(
        self, nqn, allow_any_host=False, serial_number="", model_number="", max_namespaces=0
    ):
        invalid(nqn in self.subsystems, f"Unable to create subsystem {nqn}", -32603)
        invalid(not nqn.startswith("nqn.2"), f"Unable to create subsystem {nqn}", -32603)
        invalid(len(serial_number) > 20 or len(model_number) > 40)
        self.subsystems[nqn] = {
            "nqn": nqn,
            "subtype": "NVMe",
            "allow_any_host": allow_any_host,
            "serial_number": serial_number,
            "model_number": model_number,
            "max_namespaces": max_namespaces,
            "hosts": [],
            "listen_addresses": [],
            "namespaces": [],
        }
        return True

    def nvmf_delete_subsystem(self, nqn):
        self._subsystem(nqn)
        for namespace in self.subsystems.pop(nqn)["namespaces"]:
            self.bdevs[namespace["bdev_name"]]["claimed"] = False
        return True

    def nvmf_subsystem_add_ns(self, nqn, namespace):
        subsystem = self._subsystem(nqn)
        bdev = self.bdevs.get(namespace["bdev_name"])
        invalid(bdev is None or bdev["claimed"])
        invalid(any(n["nsid"] == namespace["nsid"] for n in subsystem["namespaces"]))
        invalid(namespace["nsid"] > subsystem["max_namespaces"])
        bdev["claimed"] = True
        subsystem["namespaces"].append(namespace)
        return namespace["nsid"]

    def nvmf_subsystem_remove_ns(self, nqn, nsid):
        subsystem = self._subsystem(nqn)
        found = [n for n in subsystem["namespaces"] if n["nsid"] == nsid]
        invalid(not found)
        subsystem["namespaces"].remove(found[0])
        self.bdevs[found[0]["bdev_name"]]["claimed"] = False
        return True

    def nvmf_subsystem_add_host(self, nqn, host):
        self._subsystem(nqn)["hosts"].append({"nqn": host})
        return True

    def nvmf_subsystem_remove_host(self, nqn, host):
        hosts = self._subsystem(nqn)["hosts"]
        invalid({"nqn": host} not in hosts)
        hosts.remove({"nqn": host})
        return True

    def nvmf_subsystem_add_listener(self, nqn, listen_address):
        subsystem = self._subsystem(nqn)
        invalid(not self.transports, "Unable to find TCP transport")
        invalid(listen_address in subsystem["listen_addresses"], "Listener already exists")
        subsystem["listen_addresses"].append(listen_address)
        return True

    def nvmf_subsystem_remove_listener(self, nqn, listen_address):
        addresses = self._subsystem(nqn)["listen_addresses"]
        invalid(listen_address not in addresses)
        addresses.remove(listen_address)
        return True

    def _subsystem(self, nqn):
        invalid(nqn not in self.subsystems, f"Unable to find subsystem with NQN {nqn}")
        return self.subsystems[nqn]
