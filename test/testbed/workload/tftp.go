package workload

import (
	"bytes"
	"context"
	"io"
	"net"

	"github.com/pin/tftp/v3"
)

// tftpSize is the default length of a TFTP file.
const tftpSize = 5120

// ServeTFTP serves a file of Size bytes under every name. Its first line is the server's
// name.
func ServeTFTP(ctx context.Context, c Config) error {
	conns, err := listenAll(c.Listen, func(e endpoint) (net.PacketConn, error) {
		var lc net.ListenConfig
		return lc.ListenPacket(ctx, e.network("udp"), e.addr.String())
	})
	if err != nil {
		return err
	}
	size := c.Size
	if size == 0 {
		size = tftpSize
	}
	content := pad(c.Name, size)
	read := func(_ string, to io.ReaderFrom) error {
		if sized, ok := to.(tftp.OutgoingTransfer); ok {
			sized.SetSize(int64(len(content)))
		}
		_, err := to.ReadFrom(bytes.NewReader(content))
		return err
	}
	write := func(_ string, from io.WriterTo) error {
		_, err := from.WriteTo(io.Discard)
		return err
	}
	return serveAll(ctx, c, conns, func(conn net.PacketConn) error {
		server := tftp.NewServer(read, write)
		// In a goroutine, since Shutdown waits for transfers whose clients have ended.
		defer context.AfterFunc(ctx, server.Shutdown)()
		return server.Serve(conn)
	})
}

// pad returns a line with the name, filled up with dots and a newline to size
// bytes (or cut to it).
func pad(name string, size int) []byte {
	body := []byte(name + "\n")
	if fill := size - len(body); fill > 0 {
		body = append(body, bytes.Repeat([]byte{'.'}, fill-1)...)
		body = append(body, '\n')
	}
	return body[:min(max(size, 0), len(body))]
}
