package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
)

// remote are the flags of commands that ask a running service.
type remote struct {
	Addr    string        `env:"WEIR_ADDR" default:"127.0.0.1:8081" placeholder:"HOST:PORT" help:"The service's gRPC address (${default})."`
	Timeout time.Duration `default:"5s" help:"How long to wait for the answer (${default})."`
	clientTLS
}

// clientTLS are the flags of a client that connects by TLS.
type clientTLS struct {
	TLS        bool   `name:"tls" env:"WEIR_TLS" help:"Connect by TLS; each of the following does so too."`
	CAFile     string `name:"ca-file" env:"WEIR_CA_FILE" placeholder:"FILE" help:"Authorities (PEM) that the service's certificate must be of, instead of the system's."`
	CertFile   string `env:"WEIR_CERT_FILE" placeholder:"FILE" help:"Client certificate (PEM), if the service asks for one."`
	KeyFile    string `env:"WEIR_KEY_FILE" placeholder:"FILE" help:"Its private key (PEM)."`
	ServerName string `env:"WEIR_SERVER_NAME" placeholder:"NAME" help:"Name that the service's certificate must have, if it is not the host of --addr."`
}

func (c clientTLS) isTLS() bool {
	return c.TLS || c.CAFile != "" || c.CertFile != "" || c.KeyFile != "" || c.ServerName != ""
}

// config is what the flags say; nil: clear text.
func (c clientTLS) config() (*tls.Config, error) {
	if !c.isTLS() {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.ServerName}
	if c.CAFile != "" {
		text, err := readTLSFile("--ca-file", c.CAFile)
		if err != nil {
			return nil, err
		}
		authorities, err := parseAuthorities(text)
		if err != nil {
			return nil, fmt.Errorf("--ca-file %s: %w", c.CAFile, err)
		}
		config.RootCAs = x509.NewCertPool()
		for _, a := range authorities {
			config.RootCAs.AddCert(a)
		}
	}
	if c.CertFile == "" && c.KeyFile == "" {
		return config, nil
	}
	if c.CertFile == "" || c.KeyFile == "" {
		return nil, errors.New("a client certificate needs both --cert-file and --key-file")
	}
	cert, certErr := readTLSFile("--cert-file", c.CertFile)
	key, keyErr := readTLSFile("--key-file", c.KeyFile)
	if err := errors.Join(certErr, keyErr); err != nil {
		return nil, err
	}
	pair, err := parsePair("--cert-file "+c.CertFile, "--key-file "+c.KeyFile, cert, key)
	if err != nil {
		return nil, err
	}
	// Whatever authorities the service names: if it does not know ours, it should say so.
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	return config, nil
}

// call runs f with a client of the service.
func (r remote) call(ctx context.Context, f func(context.Context, weirv1.LeaseServiceClient) error) error {
	return r.connect(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		return f(ctx, weirv1.NewLeaseServiceClient(conn))
	})
}

// connect runs f with a connection to the service.
func (r remote) connect(ctx context.Context, f func(context.Context, grpc.ClientConnInterface) error) error {
	config, err := r.config()
	if err != nil {
		return err
	}
	creds := insecure.NewCredentials()
	if config != nil {
		creds = credentials.NewTLS(config)
	}
	conn, err := grpc.NewClient("passthrough:///"+r.Addr, grpc.WithTransportCredentials(creds))
	if err != nil {
		return fmt.Errorf("--addr %s: %w", r.Addr, err)
	}
	ctx, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	err = f(ctx, conn)
	_ = conn.Close() // nothing more is asked
	if err == nil {
		return nil
	}
	s, _ := status.FromError(err)
	// A service that misses a client certificate says so after the handshake, or is gone
	// before it is heard.
	broken := strings.HasPrefix(s.Message(), "connection error") || strings.HasPrefix(s.Message(), "error reading") || strings.Contains(s.Message(), " tcp ")
	switch {
	case broken && r.isTLS() && s.Code() == codes.Unavailable:
		return fmt.Errorf("%s: %s (%s); is it a weir that speaks TLS, and are --addr, --ca-file, --server-name, and --cert-file and --key-file if it wants them, right?", r.Addr, s.Message(), s.Code())
	case broken, s.Code() == codes.Unimplemented, s.Code() == codes.DeadlineExceeded:
		return fmt.Errorf("%s: %s (%s); is it a weir, is it ready, is --addr right, and does it want --tls?", r.Addr, s.Message(), s.Code())
	}
	return fmt.Errorf("%s: %s (%s)", r.Addr, s.Message(), s.Code())
}
