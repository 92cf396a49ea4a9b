package flood

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

const (
	// inTime is the time limit for a new connection and its first answer.
	inTime = time.Second
	// pause is the time between two connections of one client.
	pause = 10 * time.Millisecond
)

// probes are the results of honest clients.
type probes struct {
	tried int
	took  []time.Duration // of connections that ended in time
}

// probe makes clients connect, send one request and close, for a time.
func probe(ctx context.Context, host *topology.Host, target netip.AddrPort, clients int, d time.Duration) probes {
	var all probes
	var mu sync.Mutex
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for range clients {
		wg.Go(func() {
			for ctx.Err() == nil && time.Now().Before(end) {
				began := time.Now()
				err := once(ctx, host, target, began.Add(inTime))
				took := time.Since(began)
				mu.Lock()
				all.tried++
				if err == nil {
					all.took = append(all.took, took)
				}
				mu.Unlock()
				time.Sleep(pause)
			}
		})
	}
	wg.Wait()
	return all
}

// once opens a connection and requests a page, before the deadline.
func once(ctx context.Context, host *topology.Host, target netip.AddrPort, deadline time.Time) error {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	conn, err := host.Dial(ctx, "tcp", target.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetLinger(0) // no port waits in TIME-WAIT
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	req, err := http.NewRequest(http.MethodGet, "http://"+target.String()+"/", nil)
	if err != nil {
		return err
	}
	if err := req.Write(conn); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}
