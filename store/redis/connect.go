package redis

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// poolSize bounds the connections to a server. After so many failed dials, counted
// over all outages, go-redis answers from memory and dials once a second only, until a
// dial succeeds: then it counts anew.
const poolSize = 64

// maxIdle is how long a TLS connection may be idle. go-redis sees that the server has
// closed a connection before it uses it, but not with TLS: the call is sent, and lost.
// A server's own timeout for idle connections is seldom shorter.
const maxIdle = time.Minute

// connector makes the clients of an address.
type connector struct {
	address  address
	tls      func() (*tls.Config, error) // for a connection; nil: without TLS
	timeout  time.Duration               // of an answer
	patience time.Duration               // with a server that does not serve
	password func() (string, error)
	sentinel func() (string, error) // the sentinels' password
	dialed   func(host string)      // is told of each dial, by tests
}

func newConnector(o Options) (*connector, error) {
	a, err := parseAddress(o.URL)
	if err != nil {
		return nil, err
	}
	c := &connector{address: a, timeout: max(o.ReplyTimeout, minReplyTimeout), patience: usualPatience}
	switch {
	case o.PasswordFile != "" && a.password != "":
		return nil, errors.New("a password is in the URL and in a file: leave it out of the URL")
	case o.SentinelPasswordFile != "" && a.topology != sentinels:
		return nil, errors.New("there is a password of the sentinels, and the URL is not redis+sentinel://")
	case o.CAFile != "" && !a.tls:
		return nil, errors.New("there is a CA file, and the URL is not rediss://")
	}
	c.password = func() (string, error) { return a.password, nil }
	c.sentinel = func() (string, error) { return "", nil }
	if o.PasswordFile != "" {
		c.password = passwordFile(o.PasswordFile)
	}
	if o.SentinelPasswordFile != "" {
		c.sentinel = passwordFile(o.SentinelPasswordFile)
	}
	for _, read := range []func() (string, error){c.password, c.sentinel} {
		if _, err := read(); err != nil {
			return nil, err
		}
	}
	if !a.tls {
		return c, nil
	}
	c.tls = func() (*tls.Config, error) { return tlsConfig(o.CAFile) }
	if _, err := c.tls(); err != nil {
		return nil, err
	}
	return c, nil
}

// tlsConfig is for one connection: the file of authorities is read for each anew, so
// that they can be changed without a restart. The name is the host's that is dialed.
func tlsConfig(caFile string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if caFile == "" {
		return config, nil
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("the CA file: %w", err)
	}
	config.RootCAs = x509.NewCertPool()
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("the CA file %s has no certificate in PEM", caFile)
	}
	return config, nil
}

const maxPasswordFile = 64 << 10

// passwordFile returns what reads a password, for each new connection anew, so
// that it can be changed without a restart.
func passwordFile(path string) func() (string, error) {
	return func() (string, error) {
		// Nothing may wait here: a pipe would, for somebody who writes into it.
		info, err := os.Stat(path)
		if err != nil {
			return "", fmt.Errorf("the password file: %w", err)
		}
		if !info.Mode().IsRegular() || info.Size() > maxPasswordFile {
			return "", fmt.Errorf("the password file %s is not a regular file of at most %d bytes", path, maxPasswordFile)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("the password file: %w", err)
		}
		password := strings.TrimRight(string(text), "\r\n")
		if password == "" {
			return "", fmt.Errorf("the password file %s is empty", path)
		}
		return password, nil
	}
}

// client returns a client of one server. It dials when it must, one connection at
// a time. connected, which may be nil, gets something when it has.
func (c *connector) client(host string, connected chan<- struct{}) *goredis.Client {
	o := c.options(host)
	o.DB = c.address.db
	o.CredentialsProviderContext = func(context.Context) (string, string, error) {
		password, err := c.password()
		return c.address.user, password, err
	}
	o.OnConnect = func(ctx context.Context, conn *goredis.Conn) error {
		// go-redis takes an error to HELLO for that of an old server. It may also be the
		// last word of one that has no connection to give. One that loads has let us in.
		if err := conn.Ping(ctx).Err(); err != nil && !notServing(err) {
			return err
		}
		select {
		case connected <- struct{}{}:
		default:
		}
		return nil
	}
	return goredis.NewClient(o)
}

// sentinelClient returns a client of one sentinel.
func (c *connector) sentinelClient(host string) *goredis.SentinelClient {
	o := c.options(host)
	o.CredentialsProviderContext = func(context.Context) (string, string, error) {
		password, err := c.sentinel()
		return "", password, err
	}
	return goredis.NewSentinelClient(o)
}

func (c *connector) options(host string) *goredis.Options {
	o := &goredis.Options{
		Network: c.address.network,
		Addr:    host,
		Dialer:  c.dial,
		// go-redis resends a command whose reply was lost, and so would charge twice.
		MaxRetries:            -1,
		DialerRetries:         1,
		MaxConcurrentDials:    1,
		ContextTimeoutEnabled: true,
		DialTimeout:           minReplyTimeout,
		ReadTimeout:           c.timeout,
		WriteTimeout:          c.timeout,
		PoolSize:              poolSize,
		// A pipeline that finds no connection would dial for both pools.
		PipelinePoolSize: -1,
		DisableIdentity:  true,
		MaintNotificationsConfig: &maintnotifications.Config{
			Mode: maintnotifications.ModeDisabled,
		},
	}
	if c.tls != nil {
		o.ConnMaxIdleTime = maxIdle
	}
	return o
}

// dial connects, with TLS if the address says so. go-redis's own dialer does not end
// a TLS handshake with ctx.
func (c *connector) dial(ctx context.Context, network, host string) (net.Conn, error) {
	if c.dialed != nil {
		c.dialed(host)
	}
	dialer := &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3}}
	if c.tls == nil {
		return dialer.DialContext(ctx, network, host)
	}
	config, err := c.tls()
	if err != nil {
		return nil, err
	}
	return (&tls.Dialer{NetDialer: dialer, Config: config}).DialContext(ctx, network, host)
}
